"""Storage: files here, in mounted buckets and in Cloud Storage, listed, prefetched and read alike.

It may import `vertex`, for the client; it knows no component.
"""
