"""Registration of a blessed model: in the model store, in the Model Registry, and on an endpoint.

It may import `model_store`, `vertex`, and the golden examples of `validate`.
"""
