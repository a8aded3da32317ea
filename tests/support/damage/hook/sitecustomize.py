"""Installs the damages of the environment in a new interpreter: this folder is in its PYTHONPATH."""

from support.damage.installing import install

install()
