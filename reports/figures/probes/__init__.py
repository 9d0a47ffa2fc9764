"""The figures of single probes that are not about context lengths alone: what their items say."""
