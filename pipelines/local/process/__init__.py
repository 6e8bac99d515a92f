"""Processes on this machine: started, forked, isolated, and stopped without leaving an orphan.

It may import nothing else of `local`.
"""
