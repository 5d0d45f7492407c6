"""`python -m triaccel_ray.service` is `triaccel`, where the package is on the path but not installed."""

from triaccel_ray.service.cli import main

main()
