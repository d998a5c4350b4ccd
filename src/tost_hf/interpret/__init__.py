# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Looking inside a ToST model: what its heads hold, and what its layers compress (arXiv 2412.17810, section 5, appendix).

`trace_model` runs a model once and keeps what its TSSA layers saw; the other functions compute from that trace, in float64:

```python
>>> from tost_hf.interpret import compression_terms, membership_maps, trace_model

>>> trace = trace_model(model, pixel_values=pixel_values)
>>> membership_maps(trace)  # (B, L, H, rows, columns): each head's share of each patch
>>> compression_terms(trace).variational  # (B, L): the term that each layer lowers
```

`inspect_model` and `inspect_path` compute all of it for one image or text, and write pictures with a page that explains them.
"""

from .quantities import (
    NORMALIZATIONS,
    ClustersScore,
    CompressionTerms,
    EntropyByPosition,
    class_attention_maps,
    compression_terms,
    entropy_by_position,
    forget_factors,
    half_life,
    membership_clusters_score,
    membership_entropy,
    membership_maps,
    subspace_gram,
)
from .report import inspect_model, inspect_path
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
    "forget_factors",
    "half_life",
    "inspect_model",
    "inspect_path",
    "membership_clusters_score",
    "membership_entropy",
    "membership_maps",
    "subspace_gram",
    "trace_model",
]
