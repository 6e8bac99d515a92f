output "settings" {
  description = "The settings of the project, settings.toml."
  value       = <<EOT
# Machines, and what else there is: @VERTEX@
[image]
name = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.image.repository_id}/my_package:0.1.0"
packages = ["my_package"]
requirements = "requirements.txt"

[vertex]
project = "${var.project}"
location = "${var.region}"
pipeline_root = "gs://${google_storage_bucket.pipelines.name}/runs"
service_account = "${google_service_account.trainer.email}"
registry = "https://${var.region}-kfp.pkg.dev/${var.project}/${google_artifact_registry_repository.pipelines.repository_id}"

[train]
replica_count = 2
machine_type = "n1-standard-8"

[train.job]
service_account = "${google_service_account.training.email}"
%{if var.alerts || contains(var.secrets, "webhook")~}

[notify]
%{endif~}
%{if var.alerts~}
topic = "${google_pubsub_topic.alerts[0].id}"
%{endif~}
%{if contains(var.secrets, "webhook")~}
webhook_secret = "${google_secret_manager_secret.secrets["webhook"].id}/versions/latest"
%{endif~}
%{if var.mlflow_uri != ""~}

[tracking]
mlflow_uri = "${var.mlflow_uri}"
%{endif~}
%{if var.mlflow_uri != "" && contains(var.secrets, "mlflow")~}
token_secret = "${google_secret_manager_secret.secrets["mlflow"].id}/versions/latest"
%{endif~}
EOT
}
