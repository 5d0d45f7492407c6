"""The fixtures of the service's tests, for those that kill, cut off and look through a browser."""

from tests.service.conftest import (
    cluster_address,
    crew,
    experiment,
    module,
    own_ray,
    root,
    server,
    sqlite_tracker,
    starting_server,
)

__all__ = [
    "cluster_address",
    "crew",
    "experiment",
    "module",
    "own_ray",
    "root",
    "server",
    "sqlite_tracker",
    "starting_server",
]
