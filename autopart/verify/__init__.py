"""verify(): a package against the model it was made from, by running both."""

from autopart.verify.check import verify
from autopart.verify.report import VerifyReport

__all__ = ["VerifyReport", "verify"]
