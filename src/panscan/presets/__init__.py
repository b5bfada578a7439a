"""Named settings: the YAML files of the shipped presets, and how a preset file is parsed."""
