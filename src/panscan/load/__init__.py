"""Load generator: measures any OpenAI-compatible endpoint under open-loop or closed-loop traffic."""
