"""Deciding: what a source holds, and which example goes to which split, shard and position."""
