"""The view of whatever lies in a folder: a run, a search or a comparison."""

from __future__ import annotations

from triaccel_ray.service.compare.comparison import COMPARISON, read_comparison
from triaccel_ray.service.report.comparison import view_comparison
from triaccel_ray.service.report.report import View
from triaccel_ray.service.report.run import view_run
from triaccel_ray.service.report.search import view_search
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.service.search.search import SEARCH, read_search
from triaccel_ray.service.storage.copies import PAGES
from triaccel_ray.service.storage.mirror import bring
from triaccel_ray.service.storage.storage_path import StoragePath


def view_at(place: StoragePath) -> View:
    """Returns the run, search or comparison at `place`, with pictures and page written, which a store gets too.

    Raises:
        LogError: there is none, or it is damaged.
    """
    folder = place.folder
    if (folder / SEARCH).exists():
        view = view_search(read_search(folder))
    elif (folder / COMPARISON).exists():
        view = view_comparison(read_comparison(folder))
    else:
        view = view_run(read_run(folder))
    bring(place, PAGES)  # reading alone may be allowed
    return view
