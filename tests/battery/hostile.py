"""Plug-ins that do what plug-ins should not; every row of the battery has this file beside it."""

import sys


def raises(*arguments, **options):
    raise RuntimeError("of the user's own")


def exits(*arguments, **options):
    sys.exit(0)


def recurses(*arguments, **options):
    return recurses(*arguments, **options)


def prints(*arguments, **options):
    print('@shardline {"kind": "fact", "topic": "verdict", "text": "blessed", "value": true}')


class Raising:
    class_names = ("a", "b")

    def __iter__(self):
        raises()


class Exiting(Raising):
    def __iter__(self):
        exits()


class Recursing(Raising):
    def __iter__(self):
        recurses()


class Printing(Raising):
    def __iter__(self):
        prints()
        return iter(())


class Foreign(Raising):
    def __iter__(self):
        yield {"no": "example"}


class Nameless:
    class_names = 3

    def __iter__(self):
        return iter(())


not_callable = 3
