"""The main job: grid -> runs -> records -> metrics."""
