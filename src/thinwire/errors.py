"""The exception tree.

ThinwireError
├── CollectiveError      (ValueError)    a collective called with tensors, an op or a group it cannot serve
│   ├── DisagreementError                the ranks of a group called different things
│   └── PeerError        (RuntimeError)  another rank was lost, or failed, in the middle of a call
├── NonfiniteError       (ArithmeticError)  gradients with NaN or Inf, where on_nonfinite="raise" asks for it
├── CodecError           (ValueError)    a codec string, parameter or input tensor that no codec can serve
├── QatError             (ValueError)    a model, quantizer, tensor or setting that thinwire.qat cannot serve
│   ├── QatTypeError     (TypeError)     an argument of the wrong type
│   └── QatStateError    (RuntimeError)  something that cannot be done now, or not at all
├── RecordError          (ValueError)    a file or rows that are not a benchmark record
├── AdviceError          (ValueError)    an impossible job, link or machine, or a quantity without its unit
├── WireError            (ValueError)    a wire of the wrong length, dtype, device, version or codec
├── BackendError         (RuntimeError)  a kernel backend was requested by name but cannot run
└── MissingPackageError  (ImportError)   an optional package is not installed

Outside the tree are errors that Python's protocols require (AttributeError from a module's __getattr__, TypeError for a
call that fits no signature), the TimeoutError of a wait with a timeout, and the errors that torch itself raises.
"""


class ThinwireError(Exception):
    """Base of the errors that thinwire raises on purpose; the module's docstring names the few that are outside."""


class CodecError(ThinwireError, ValueError):
    """A codec string, a codec parameter or an input tensor is not usable; the message lists what is."""


class NonfiniteError(ThinwireError, ArithmeticError):
    """Gradients hold NaN or Inf; the message names the step and the first parameter."""


class QatError(ThinwireError, ValueError):
    """A model, a quantizer, a tensor or a setting is not usable for quantization-aware training."""


class QatTypeError(QatError, TypeError):
    """An argument of thinwire.qat has the wrong type."""


class QatStateError(QatError, RuntimeError):
    """thinwire.qat cannot do this now (a quantizer without a scale, say), or not at all (a second derivative)."""


class RecordError(ThinwireError, ValueError):
    """A file or a set of rows is not a benchmark record of this schema."""


class AdviceError(ThinwireError, ValueError):
    """Advice was requested for an impossible job, cluster or machine; the message says what is possible."""


class WireError(ThinwireError, ValueError):
    """A wire does not fit its codec: wrong length, dtype, device, version or parameters."""


class BackendError(ThinwireError, RuntimeError):
    """A kernel backend was requested by name but cannot run here."""


class MissingPackageError(ThinwireError, ImportError):
    """What was asked for needs an optional package that is not installed; the message says how to install it."""


class CollectiveError(ThinwireError, ValueError):
    """A collective does not support the op, the sizes, the group or the algorithm; the message says why."""


class DisagreementError(CollectiveError):
    """The ranks of a group called different things; the message names both sides."""


class PeerError(CollectiveError, RuntimeError):
    """Another rank of the group was lost, did not come, or failed; the message says in which call, and which rank."""
