"""Trials of parked tensors on simulated devices. The first word names one of the functions."""

import copy
import gc
import pickle
import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopipe.script.state.parked import device_of_storage, is_parked, park, plain_of

GPU = torch.device("cuda", 0)


def _parked_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))
    park(parameter, parameter.detach(), GPU)
    return parameter


def memory_says_the_device_while_a_tensor_has_it() -> None:
    parameter = _parked_parameter()
    alias, memory = parameter.detach(), plain_of(parameter).untyped_storage()
    del parameter
    assert device_of_storage(memory) == "cuda:0"
    del alias
    gc.collect()
    assert device_of_storage(memory) is None


def a_fake_result_has_no_part_in_the_memory() -> None:
    parameter = _parked_parameter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = [parameter.detach(), parameter.data, parameter.view(1, 3), parameter[1:], parameter.detach() * 2]
        with torch.no_grad():
            results += [parameter.view(1, 3), parameter[1:], parameter.add_(1), parameter.to("cuda")]
    assert {result.device for result in results} == {GPU}
    assert is_parked(parameter) and plain_of(parameter).tolist() == [1.0, 1.0, 1.0]
    fakes = [result for result in results if result is not parameter]
    assert not any(is_parked(fake) or device_of_storage(fake.untyped_storage()) for fake in fakes)


def a_parameter_is_written_and_copied_as_on_the_device() -> None:
    parameter, real = _parked_parameter(), nn.Parameter(torch.ones(3, device=GPU))
    of_data = nn.Parameter(parameter.data)
    for each in (parameter, of_data, real):
        assert "_is_param" not in vars(each)
        each.no_decay = True
    assert pickle.dumps(parameter) == pickle.dumps(of_data)
    read = pickle.loads(pickle.dumps(parameter))
    assert vars(read) == vars(pickle.loads(pickle.dumps(real)))
    assert read.no_decay and type(read) is nn.Parameter
    assert [hasattr(copy.deepcopy(each), "no_decay") for each in (parameter, real)] == [False, False]
    assert copy.copy(parameter).no_decay and is_parked(parameter)


globals()[sys.argv[1]]()
