"""Lightning's own demonstration model: two epochs, accumulation, clipping, validation, a checkpoint."""

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("train", loss, on_step=True, on_epoch=True)
        print(f"{self.current_epoch} {batch_idx} {loss.item():.17g}")
        return loss

    def validation_step(self, batch, batch_idx):
        loss = super().validation_step(batch, batch_idx)["x"]
        self.log("valid", loss)
        return loss

    def on_validation_epoch_end(self):
        print({key: f"{value:.17g}" for key, value in self.trainer.callback_metrics.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed_everything(3, verbose=False)
    model = Model()
    trainer = Trainer(
        max_epochs=2,
        limit_train_batches=6,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=".",
    )
    trainer.fit(model)
    print(f"{sum(p.double().sum().item() for p in model.parameters()):.17g}")
    trainer.save_checkpoint("boring.ckpt")
    torch.save(model.state_dict(), "boring.pt")
