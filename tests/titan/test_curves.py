"""A killed and resumed run is one curve in TensorBoard."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from topoep_titan.titan import device

device.install()

from topoep_titan.titan.metrics import _OneCurve


def test_steps_logged_again_replace_the_older_ones(tmp_path):
    for steps, loss in (((1, 2, 3, 4), 5.0), ((3, 4, 5), 6.0)):  # killed after 4, resumed after 2
        logger = _OneCurve(str(tmp_path))
        for step in steps:
            logger.log({"loss": loss}, step)
        logger.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [
        (1, 5.0), (2, 5.0), (3, 6.0), (4, 6.0), (5, 6.0),
    ]  # fmt: skip
