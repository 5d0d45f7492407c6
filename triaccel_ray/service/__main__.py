"""Entry point of `triaccel`, and of `python -m triaccel_ray.service` if the package is not installed."""

from __future__ import annotations

from triaccel_ray.service.signals import exiting_on_interrupt

with exiting_on_interrupt():  # before the slow imports
    from triaccel_ray.service.cli.main import main

if __name__ == "__main__":
    main()
