"""What an operator gets of its three roles: the registered op, autograd, autocast, sharding rules."""
