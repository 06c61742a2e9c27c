"""Steps of pipeline stages."""
