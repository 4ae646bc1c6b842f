# JupyterLab with the notebooks:
#   docker build -t nbparallel . && docker run --rm -it -p 127.0.0.1:8888:8888 nbparallel
# and open the address that it prints.  Memory counts against --memory; --shm-size=1g is needed only for the
# sharing strategy file_system, which uses /dev/shm (64 MB by default).
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends make && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home student
USER student
WORKDIR /home/student/nbparallel
COPY --chown=student . .
RUN make setup
EXPOSE 8888
CMD ["make", "lab", "ARGS=--ip=0.0.0.0 --no-browser"]
