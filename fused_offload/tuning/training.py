"""Training runs that `fused-offload plan` plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fused_offload.config import OffloadConfig
from fused_offload.kernels.formats import REMAINDER, Format
from fused_offload.rules.adam import EXP_AVG_SQ_FORMATS
from fused_offload.rules.arguments import EXP_AVG_FORMATS, MASTER_FORMATS
from fused_offload.rules.base import MASTER_PARAM
from fused_offload.rules.muon import MOMENTUM_FORMATS, MuonRule
from fused_offload.state.layout import Layout

from .cli_choices import DTYPES, MOMENT_DTYPES
from .recipes import RECIPES

PARAM_DTYPES = dict(zip(DTYPES, (torch.float32, torch.bfloat16, torch.float16), strict=True))
STORED_DTYPES = dict(zip(MOMENT_DTYPES, (*PARAM_DTYPES.values(), torch.uint8), strict=True))


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of a training run.

    Dtypes are keys of `PARAM_DTYPES`, those of moments are keys of `STORED_DTYPES`.

    Attributes:
        param_dtype: dtype of the parameters.
        grad_dtype: dtype of the gradients.
        master: one of `MASTERS`.
        exp_avg: stored dtype of the first moment.
        exp_avg_sq: stored dtype of the second moment.
        data_parallel: data-parallel ranks; they share the optimizer's state, but for Muon's.
        model_parallel: ranks that share the parameters (tensor times pipeline parallel size).
        shard_params: True if data-parallel ranks share parameters and gradients, too (FSDP).
        offload: fraction, chunks and window; ``"auto"`` means the defaults without a profile.
        ranks_per_node: ranks whose state is in one host's memory.
        other_gpu_bytes: GPU memory for activations, CUDA context and others. A window of
            ``"auto"`` is part of it.
        in_backward: True if gradients are applied and freed during the backward pass
            (`step_in_backward`).
        largest_matrix: rows and columns of the largest matrix on a rank, if all parameters are
            matrices under Muon, whose momentum has the dtype ``exp_avg``. None for Adam.
        layer_wise: True if each data-parallel rank has Muon's state of some matrices only, as in
            Megatron's layer-wise optimizer.
        params_on_host: True if parameters and gradients are in host memory (FSDP2's
            ``CPUOffloadPolicy``), and their state with them.
        quantised: one of `RECIPES`, if all parameters are quantised; None if they are plain.
        largest_quantised: rows and columns of the largest quantised parameter on a rank, before
            data-parallel ranks share it.
        fp8_param_gather: True if the quantised parameters are Megatron's, whose ranks share state.
    """

    param_dtype: str = "bf16"
    grad_dtype: str = "bf16"
    master: str = "fp32"
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    data_parallel: int = 1
    model_parallel: int = 1
    shard_params: bool = False
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    ranks_per_node: int = 1
    other_gpu_bytes: int = 0
    in_backward: bool = False
    largest_matrix: tuple[int, int] | None = None
    layer_wise: bool = False
    params_on_host: bool = False
    quantised: str | None = None
    largest_quantised: tuple[int, int] | None = None
    fp8_param_gather: bool = False

    def __post_init__(self) -> None:
        if self.params_on_host:
            self._check_params_on_host()
        self._check_quantised()
        if self.layer_wise and self.largest_matrix is None:
            raise ValueError("only Muon is layer-wise; give --muon, too, or leave --layer-wise out")
        if self.largest_matrix is not None and (self.in_backward or self.offload.window_bytes != 0):
            raise ValueError("Muon steps behind the backward pass and without a window: leave both out")
        if self.largest_matrix is not None and self.shard_params:
            raise ValueError("Muon steps whole matrices, not the parts that FSDP leaves on a rank; leave sharding out")
        if self.largest_matrix is not None and STORED_DTYPES[self.exp_avg] not in MOMENTUM_FORMATS:
            raise ValueError(f"Muon keeps its momentum in fp32 or bf16, not in {self.exp_avg}")
        if self.in_backward and self.offload.window_bytes != 0:
            raise ValueError("stepping in backward needs window_bytes=0: its copies run under the backward pass anyway")

    def _check_params_on_host(self) -> None:
        if self.largest_matrix is not None:
            raise ValueError("Muon cannot step parameters on the host; choose one of the two")
        if self.in_backward:
            raise ValueError("parameters on the host cannot be stepped in backward; choose one of the two")
        if self.offload.window_bytes != 0:
            raise ValueError("parameters on the host need window_bytes=0: their state moves beside them in the step")
        if self.data_parallel > 1 and not self.shard_params:
            raise ValueError("parameters on the host are sharded by FSDP2: plan them with --shard-params")

    def _check_quantised(self) -> None:
        if (self.quantised is None) != (self.largest_quantised is None):
            raise ValueError("--quantised and --largest-param go together: give both or none")
        if self.quantised is None:
            if self.fp8_param_gather:
                raise ValueError("--fp8-param-gather needs the recipe of the parameters: give --quantised, too")
            return
        if self.largest_matrix is not None or self.params_on_host:
            raise ValueError("quantised parameters are stepped by Adam and Lion, and on the GPU: leave the other out")
        if self.master not in ("fp32", "fp16"):
            raise ValueError(f"quantised parameters need masters of their own, fp32 or fp16, not {self.master}")
        if self.fp8_param_gather and (self.shard_params or self.in_backward or self.quantised == "nvfp4"):
            raise ValueError(
                "Megatron keeps the masters of NVFP4 parameters and of Megatron-FSDP, and does not step in backward: "
                "leave the other or --fp8-param-gather out"
            )
        if self.in_backward and not self.may_step_in_backward:
            raise ValueError("ranks agree on the scales of these parameters, so they cannot be stepped in backward")

    @property
    def may_step_in_backward(self) -> bool:
        """True if `step_in_backward` goes with the parameters."""
        in_agreement = self.shard_params and self._agrees
        return self.largest_matrix is None and not (self.params_on_host or self.fp8_param_gather or in_agreement)

    @property
    def may_be_sharded(self) -> bool:
        """True if ``shard_params`` goes with the parameters and with the step."""
        in_agreement = self.in_backward and self._agrees
        return self.largest_matrix is None and not (self.fp8_param_gather or in_agreement)

    @property
    def _agrees(self) -> bool:
        """True if ranks that share a parameter agree on its scale."""
        return self.quantised is not None and RECIPES[self.quantised].agrees

    @property
    def shares_state(self) -> bool:
        """True if data-parallel ranks divide the state."""
        if self.largest_matrix is not None:
            return self.layer_wise
        return self.quantised is None or self.shard_params or self.fp8_param_gather

    @property
    def state_parallel(self) -> int:
        """Number of data-parallel ranks that the state is divided among."""
        return self.data_parallel if self.shares_state else 1

    def layout(self) -> Layout:
        """The optimizer's layout of offloaded state.

        Raises:
            ValueError: for remainders of parameters that have none.
        """
        if self.master == "remainder" and self.param_dtype != "bf16":
            raise ValueError(
                f"a remainder needs bf16 parameters, whose master it completes, but they are {self.param_dtype}: use "
                "another master"
            )
        formats: dict[str, Format] = {
            "exp_avg": EXP_AVG_FORMATS[STORED_DTYPES[self.exp_avg]],
            "exp_avg_sq": EXP_AVG_SQ_FORMATS[STORED_DTYPES[self.exp_avg_sq]],
        }
        if self.largest_matrix is not None:
            formats = dict(MuonRule(momentum_dtype=STORED_DTYPES[self.exp_avg]).formats)
        if self.master == "remainder":
            formats[MASTER_PARAM] = REMAINDER
        elif self.master != "none":
            master = MASTER_FORMATS[PARAM_DTYPES[self.master]]
            formats[MASTER_PARAM] = master._replace(of_quantised=self.quantised is not None)
        return Layout(
            torch.device("cuda"),
            PARAM_DTYPES[self.param_dtype],
            tuple(formats.items()),
            resident=False,
            params_on_host=self.params_on_host,
        )
