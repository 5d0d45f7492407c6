"""What Ray Tune may draw from a search space, as strategies of Hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from ray.tune.search.sample import Categorical, Float

from triaccel_ray.search_spaces.thresholds import OPTIONAL, SPACES


def draws(domain: Any) -> st.SearchStrategy[Any]:
    """Values of one of Tune's domains, its bounds among them."""
    if isinstance(domain, Categorical):
        return st.sampled_from(domain.categories)
    assert isinstance(domain, Float)
    return st.floats(domain.lower, domain.upper)


def samples(space: str) -> st.SearchStrategy[dict[str, Any]]:
    """Samples of the space with any of the optional dimensions."""
    required = {name: draws(domain) for name, domain in SPACES[space].items()}
    optional = {name: draws(domain) for name, domain in OPTIONAL.items()}
    return st.fixed_dictionaries(required, optional=optional)
