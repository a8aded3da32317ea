"""How close is equal, where bits are not promised."""

from autopipe.runtime.check import Comparison, TensorDifference


def compared(*tensors: tuple[float, float], loss: float = 1.0) -> Comparison:
    """Return a comparison of tensors with these (errors, noises)."""
    differences = tuple(TensorDifference(str(i), error, False, 0, noise) for i, (error, noise) in enumerate(tensors))
    usual = sorted(noise for _, noise in tensors)[len(tensors) // 2]
    return Comparison(differences, (loss,), (1.0,), False, ("replicas",), usual)


def test_a_few_times_the_noise_is_equal():
    assert compared((3e-5, 1e-5), (2e-5, 1e-5), (1e-5, 1e-5)).equal
    assert not compared((9e-4, 1e-5), (2e-5, 1e-5), (1e-5, 1e-5)).equal


def test_a_tensor_that_is_nothing_but_noise_excuses_itself_alone():
    # a key's bias in attention: its true gradient is zero
    assert compared((1.9, 1.0), (2e-7, 1e-7), (1e-7, 1e-7)).equal
    assert not compared((1.9, 1.0), (0.01, 1e-7), (1e-7, 1e-7)).equal


def test_a_loss_is_held_to_the_usual_noise():
    assert not compared((0.0, 1.0), (0.0, 1e-7), (0.0, 1e-7), loss=1.001).equal
