"""The entry point: `triaccel`, and `python -m triaccel_ray.service` where the package is not installed."""

from __future__ import annotations

from triaccel_ray.service.signals import nothing_begun

with nothing_begun():  # before anything that takes long to import
    from triaccel_ray.service.cli.main import main

if __name__ == "__main__":
    main()
