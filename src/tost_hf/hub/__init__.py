"""The Hub: model cards, what may be published, publishing in one commit, verification, the operator as a kernel."""
