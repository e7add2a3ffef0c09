"""What the compiled operators mean; importing this package registers torch.ops.asapc.*."""

from asapc.operators import library as library  # registers the operators
