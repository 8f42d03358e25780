"""The fixture that tests of the simulated device share."""

from tests.support.simulated_cuda.late import late as late
