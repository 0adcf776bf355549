"""The command `vllm-refit doctor | plan | bench | verify`, and the plan of a recipe without a GPU. Nothing else imports this."""
