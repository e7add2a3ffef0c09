"""Registration of the operators as torch.ops.asapc.*: kernels, fakes and gradients.

The plain functions in operators/ are the meaning, kernels/ their fast twins; kernels/dispatch.py says
which of them runs.
"""

from asapc.operators.library import child as child
from asapc.operators.library import duals as duals
from asapc.operators.library import esp as esp
from asapc.operators.library import loops as loops
from asapc.operators.library import lot as lot
from asapc.operators.library import masks as masks
from asapc.operators.library import stabilised as stabilised
