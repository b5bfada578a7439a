"""How the bundled mini model is trained and evaluated. Not part of the package; see training/README.md."""
