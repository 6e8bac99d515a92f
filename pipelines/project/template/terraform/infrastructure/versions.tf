terraform {
  required_version = ">= 1.3"

  required_providers {
    google = {
      source = "hashicorp/google"
      # Every resource was checked against the schema of 6.50.
      version = "~> 6.50"
    }
  }
  # The state is a file here. A team shares it: https://developer.hashicorp.com/terraform/language/backend/gcs
}

provider "google" {
  project = var.project
  region  = var.region
}
