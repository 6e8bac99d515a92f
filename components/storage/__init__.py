"""Storage: listing, prefetching and reading of local files and Cloud Storage objects.

It may import `vertex`, for the client, but no component.
"""
