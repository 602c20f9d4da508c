"""Tests of ``models/``."""

# runs before any test module of this folder, and so before their imports of torchtitan
import conf.titan  # noqa: F401
