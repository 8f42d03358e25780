"""Batch inference on several machines with Ray Data.

    import offspec.ray, ray

    rows = ray.data.read_json("questions.jsonl")  # columns: messages (or prompt), sampling_params, id
    offspec.ray.predict(rows, "./Qwen3-32B", draft="./Qwen3-0.6B").write_parquet("answers")

One actor per machine, or per GPU, loads the model. The driver process does not import torch.
"""

from offspec.ray.predict import Predictor, predict

__all__ = ["Predictor", "predict"]
