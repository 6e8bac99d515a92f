"""Registration of a blessed model: in the model store, in the Model Registry, and on an endpoint."""

from shardline.components.register.registration import Deploy, ModelUpload, register_model

__all__ = ["Deploy", "ModelUpload", "register_model"]
