"""Changes to a plan that was found: orders, nesting, replicas, what lies outside the devices."""
