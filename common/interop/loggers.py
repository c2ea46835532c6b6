"""Third-party loggers, with the interface of tracker.Logger: TensorBoard, Weights & Biases."""

from common import config
from common.config import explained, need


class TensorBoard:
    """Event files in RUN/tensorboard. Steps that a resumed run repeats replace the earlier ones."""

    def open(self, cfg, folder, known, step):
        tensorboard = need("torch.utils.tensorboard", "--logger tensorboard", "tensorboard")
        self.writer = tensorboard.SummaryWriter(folder / "tensorboard", purge_step=step + 1)
        return {}

    def log(self, step, metrics, samples):
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        for name, path, caption in samples:  # add_image and add_audio would encode the files again
            content = path.read_bytes()
            value = Summary.Value(tag=name)
            if path.suffix == ".png":
                value.image.encoded_image_string = content
            else:
                value.audio.encoded_audio_string = content
                value.audio.content_type = "audio/wav"
            self.writer.file_writer.add_summary(Summary(value=[value]), step)
            self.writer.add_text(name, caption, step)
        self.writer.flush()  # a run resumed from a later checkpoint does not log this step again

    def file(self, path):
        self.writer.add_text(path.name, f"```\n{path.read_text()}\n```")

    def finish(self, error):
        if error:
            self.writer.add_text("error", repr(error))
        self.writer.close()


class WandB:
    """A Weights & Biases run. The service ignores steps that a resumed run logs again."""

    def __init__(self, **options):
        """options: arguments of wandb.init, such as project, entity, name and id."""
        self.options = options

    def open(self, cfg, folder, known, step):
        wandb = need("wandb", "--logger wandb")
        # wandb raises its own types of errors, for example if there is no account or network.
        with explained(
            "--logger wandb: check the account (`wandb login`), the network and the run to resume, "
            "or set WANDB_MODE=offline"
        ):
            self.run = wandb.init(
                **{"name": str(folder), **known, **self.options},
                config=config.as_json(cfg),
                dir=folder,
                resume="must" if known else "allow",
            )
        self.media = {".png": wandb.Image, ".wav": wandb.Audio}
        if self.run.disabled:  # the entity is "dummy"; do not record it for later starts
            return known
        return {name: getattr(self.run, name) for name in ("project", "entity", "id")}

    def log(self, step, metrics, samples):
        for name, path, caption in samples:
            metrics[name] = self.media[path.suffix](str(path), caption=caption)
        self.run.log(metrics, step=step)

    def file(self, path):
        self.run.save(path, base_path=path.parent, policy="now")

    def finish(self, error):
        if isinstance(error, Exception):
            self.run.alert(title="training ended with an error", text=repr(error))
        self.run.finish(exit_code=int(error is not None))


LOGGERS = {"tensorboard": TensorBoard, "wandb": WandB}
