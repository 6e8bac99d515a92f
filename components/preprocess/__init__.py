"""Preprocessing: a source of labelled images becomes balanced TFRecord shards and their manifest."""
