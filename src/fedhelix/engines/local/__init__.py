"""A client's local work: setup, batches, training and evaluation."""

from fedhelix.engines.local.batches import BatchSchedule, batch_schedule, gather, samples_of
from fedhelix.engines.local.evaluation import evaluate, evaluate_clients
from fedhelix.engines.local.network import (
    EVALUATED_AT_ONCE,
    base_loss,
    features,
    forward,
    module_of,
    part_of,
    predict,
)
from fedhelix.engines.local.setup import (
    ClientResult,
    ClientTask,
    Outputs,
    Scores,
    Setup,
    Subset,
    Training,
)
from fedhelix.engines.local.training import (
    PERSONALIZE,
    make_client,
    noise,
    personal_model,
    phases_of,
    received_model,
    run_client,
    start_personal,
    start_round,
    train,
    unpersonalized_model,
)

__all__ = [
    "EVALUATED_AT_ONCE",
    "PERSONALIZE",
    "BatchSchedule",
    "ClientResult",
    "ClientTask",
    "Outputs",
    "Scores",
    "Setup",
    "Subset",
    "Training",
    "base_loss",
    "batch_schedule",
    "evaluate",
    "evaluate_clients",
    "features",
    "forward",
    "gather",
    "make_client",
    "module_of",
    "noise",
    "part_of",
    "personal_model",
    "phases_of",
    "predict",
    "received_model",
    "run_client",
    "samples_of",
    "start_personal",
    "start_round",
    "train",
    "unpersonalized_model",
]
