"""The exception tree.

ThinwireError
├── CollectiveError    (ValueError)    a collective called with tensors, an op or a group it cannot serve
│   └── DisagreementError              the ranks of a group called different things
├── CodecError         (ValueError)    a codec string, parameter or input tensor that no codec can serve
├── RecordError        (ValueError)    a benchmark record that is not one
├── AdviceError        (ValueError)    a job, link or machine that cannot be, or a quantity without its unit
├── WireError          (ValueError)    a wire of the wrong length, dtype, device, version or codec
└── BackendError       (RuntimeError)  a kernel backend was asked for by name and cannot serve
"""


class ThinwireError(Exception):
    """Base of every error thinwire raises on purpose."""


class CodecError(ThinwireError, ValueError):
    """A codec string, a codec parameter or an input tensor is not usable; the message lists what is."""


class RecordError(ThinwireError, ValueError):
    """A file or a set of rows is not a benchmark record of this schema."""


class AdviceError(ThinwireError, ValueError):
    """Advice was asked for on a job, a cluster or a machine that cannot be; the message says what can."""


class WireError(ThinwireError, ValueError):
    """A wire does not fit its codec: wrong length, dtype, device, version or parameters."""


class BackendError(ThinwireError, RuntimeError):
    """A kernel backend was requested by name but cannot run here."""


class CollectiveError(ThinwireError, ValueError):
    """A collective cannot do what it was asked: the op, the sizes, the group or the algorithm; the message says why."""


class DisagreementError(CollectiveError):
    """The ranks of a group called different things; the message names both sides."""
