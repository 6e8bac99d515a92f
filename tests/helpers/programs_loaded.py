"""Loads what the programs of tests import, when multiprocessing's fork server imports it: see `programs`."""

from tests.helpers import programs

programs.preload()
