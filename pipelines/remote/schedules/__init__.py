"""Schedules: declared in a file, compared with those on the platform, and brought to what is declared."""
