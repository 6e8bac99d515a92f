"""Publish a blessed model where its readers find the champion."""
