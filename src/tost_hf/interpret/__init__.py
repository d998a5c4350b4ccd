# Copyright 2026 the tost_hf authors. Licensed under the Apache License, Version 2.0.
"""Looking inside a ToST model; the functions are those of `report.py`."""

from .report import (
    NORMALIZATIONS,
    ClustersScore,
    CompressionTerms,
    EntropyByPosition,
    ModelTrace,
    class_attention_maps,
    compression_terms,
    entropy_by_position,
    inspect_model,
    inspect_path,
    membership_clusters_score,
    membership_entropy,
    membership_maps,
    subspace_gram,
    trace_model,
)


__all__ = [
    "NORMALIZATIONS",
    "ClustersScore",
    "CompressionTerms",
    "EntropyByPosition",
    "ModelTrace",
    "class_attention_maps",
    "compression_terms",
    "entropy_by_position",
    "inspect_model",
    "inspect_path",
    "membership_clusters_score",
    "membership_entropy",
    "membership_maps",
    "subspace_gram",
    "trace_model",
]
