# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Interpretation of a ToST model: memberships, compression terms, subspaces (arXiv 2412.17810, section 5, appendix).

`trace_model` runs a model once and records what its TSSA layers compute; the other functions compute from that trace, in
float64:

```python
>>> from tost_hf.interpret import compression_terms, membership_maps, trace_model

>>> trace = trace_model(model, pixel_values=pixel_values)
>>> membership_maps(trace)  # (B, L, H, rows, columns), of each patch in each head
>>> compression_terms(trace).variational  # (B, L): what each layer lowers
```

`inspect_model` and `inspect_path` compute all of it for one image or text, and write plots and a table of the layers.
The functions of `tost_hf.interpret.plots` return single plots as matplotlib figures:

```python
>>> from tost_hf.interpret.plots import plot_membership_maps

>>> picture = image.resize((224, 224))  # as the model sees it
>>> pixels = torch.tensor(numpy.array(picture)) / 255  # (height, width, 3)
>>> figure = plot_membership_maps(membership_maps(trace)[0], pixels, trace.layers)
>>> figure.savefig("maps.png")
```
"""

from .inspection import inspect_model, inspect_path
from .quantities import (
    NORMALIZATIONS,
    ClustersScore,
    CompressionTerms,
    EntropyByPosition,
    class_attention_maps,
    compression_terms,
    entropy_by_position,
    half_life,
    membership_clusters_score,
    membership_entropy,
    membership_maps,
    subspace_gram,
    token_decay,
)
from .trace import ModelTrace, trace_model


__all__ = [
    "NORMALIZATIONS",
    "ClustersScore",
    "CompressionTerms",
    "EntropyByPosition",
    "ModelTrace",
    "class_attention_maps",
    "compression_terms",
    "entropy_by_position",
    "half_life",
    "inspect_model",
    "inspect_path",
    "membership_clusters_score",
    "membership_entropy",
    "membership_maps",
    "subspace_gram",
    "token_decay",
    "trace_model",
]
