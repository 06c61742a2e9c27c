"""From a module to a plan, without devices or processes."""
