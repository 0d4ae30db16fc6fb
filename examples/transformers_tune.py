# Run with: python examples/transformers_tune.py        (needs: pip install "penstock[transformers]")
"""Tune a small transformer, made here and trained by Hugging Face's Trainer: nothing is downloaded."""

import penstock as pk


def train(run):
    """One trial: an ordinary Trainer with one callback more."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from penstock.integrations import TransformersCallback

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (192, 12), generator=generator)
    rows = [{"input_ids": row, "labels": (row > 15).sum() > 6} for row in tokens]
    for row in rows:
        row["labels"] = row["labels"].long()
    torch.manual_seed(run.seed)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=run.config["dropout"],
    )
    callback = TransformersCallback(run, metrics={"eval_loss": "loss"})
    arguments = TrainingArguments(
        output_dir=str(run.folder),
        num_train_epochs=3,
        learning_rate=run.config["lr"],
        per_device_train_batch_size=32,
        eval_strategy="epoch",
        save_strategy="epoch",  # what it saves is the trial's checkpoint
        save_total_limit=1,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        train_dataset=rows[:128],
        eval_dataset=rows[128:],
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=callback.resume_from)


study = pk.Study(
    train,
    pk.Space(lr=pk.Float(1e-4, 3e-2, log=True), dropout=pk.Float(0, 0.3)),
    minimize="loss",
    scheduler=pk.Halving(max_epochs=3, min_epochs=1, eta=3, trials=3),
    executor=pk.Local(1),
    store="transformers.db",
)

if __name__ == "__main__":
    study.run(view="auto")
    print(study)
