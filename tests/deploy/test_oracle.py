"""Our FedAvg across sites against Flower's own strategy on the same replies."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedhelix.deploy import messages
from fedhelix.runs.spec import make_spec
from helpers import close
from in_process import InProcessDeployment


def test_fedavg_is_flowers_fedavg(tmp_path):
    deployment, replies = InProcessDeployment(tmp_path, 3), []
    for node, answer in list(deployment.grid.answers.items()):

        def spy(content, node=node, answer=answer):
            reply = answer(content)
            header, body = messages.read(reply)
            if header["kind"] == "train":
                question = Message(RecordDict(), dst_node_id=node, message_type="train")
                question.metadata.__dict__["_message_id"] = f"question-{node}"
                arrays, count = (
                    ArrayRecord(body["model"]),
                    MetricRecord({"num-examples": header["samples"]}),
                )
                replies.append(
                    Message(RecordDict({"arrays": arrays, "metrics": count}), reply_to=question)
                )
            return reply

        deployment.grid.answers[node] = spy
    settings = {"clients": 3, "rounds": 1, "epochs": 1, "kernels": "onednn", "model": "digits-cnn"}
    run = deployment.fit(make_spec("fedavg", settings))
    theirs, _ = FedAvg(min_train_nodes=3, min_available_nodes=3).aggregate_train(1, replies)
    ours = run.state.server["model"]
    assert theirs is not None and list(theirs) == list(ours)
    assert close(
        ours, {name: torch.as_tensor(value) for name, value in theirs.to_torch_state_dict().items()}
    )
