"""Registration of a blessed model: in the model store, in the Model Registry, and on an endpoint."""
