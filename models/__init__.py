"""Llama-3 and GPT-2: modules, initial weights, loss, names, counts and samples."""

# runs before any module of this folder, and so before their imports of torchtitan
import conf.titan  # noqa: F401
