"""How good the tests are: how long they take, and which planted faults they find."""
