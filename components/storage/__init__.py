"""Storage: listing, prefetching and reading of local files, mounted buckets and Cloud Storage objects.

It may import `vertex`, for the client, but no component.
"""
