"""Registration of the operators as torch.ops.asapc.*: kernels, fakes and gradients.

The plain functions in operators/ are the reference, kernels/ their fast twins; kernels/dispatch.py says
which of them runs.
"""

from asapc.kernels.library import beside as beside
from asapc.kernels.library import esp as esp
from asapc.kernels.library import loops as loops
from asapc.kernels.library.attention import without_kernels

without_kernels()
